"""What searches of kernel parameters have in common, whatever they measure (docs/tuning.md)."""
