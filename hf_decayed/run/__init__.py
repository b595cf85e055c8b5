"""What every training script has once."""
