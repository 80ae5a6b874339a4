"""Implements `cocodiff demo`: what the compiler gains over slow links, in pictures and figures."""
