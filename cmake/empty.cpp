// Keeps a layer that has headers only a valid library.
