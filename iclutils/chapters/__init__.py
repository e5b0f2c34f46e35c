"""Lenses: one module per way of looking. They measure and intervene; they never draw."""
