"""Finding damage before it is needed (scrub) and mending it from other copies."""
