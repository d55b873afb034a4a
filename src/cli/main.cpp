#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"assay finds the first wrong tensor in a running LLM."};
  int exit_code = 0;
  CLI11_PARSE(app, argc, argv);
  return exit_code;
}
