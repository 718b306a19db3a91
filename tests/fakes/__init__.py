"""In-memory stand-ins behind the ports: the whole loop in one process, with real algorithm maths."""
