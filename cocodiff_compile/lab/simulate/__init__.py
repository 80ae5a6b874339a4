"""What a step would cost on a machine one does not have: `cocodiff simulate`."""
