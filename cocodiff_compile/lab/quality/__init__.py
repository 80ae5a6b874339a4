"""How far a lossy run is from the exact one: a small trained model, and the measures."""
