"""The demo: the main job on an embedded fleet, measured and compared."""
