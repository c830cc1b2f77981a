"""Quality metrics: FID, KID, CLIP score, preference and perceptual distances, with their networks."""
