"""Profiles: what to observe in a framework, under canonical names. Each is a module with TRIGGERS, the names of the modules
whose import loads it, and install(session)."""
