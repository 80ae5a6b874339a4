"""`cocodiff doctor`: what this machine has, what of it is used, and what would go wrong."""
