"""Find damage before it matters (scrub), and repair it from other copies."""
