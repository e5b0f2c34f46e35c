"""Chapter 07: one prompt, and what each way of looking at it marks."""
