"""Drafters made of two models or of two drafters: SAM with EAGLE-1, cascades."""
