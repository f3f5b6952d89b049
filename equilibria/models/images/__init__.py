"""Models of images: classifiers, segmentation, prompts and inverse problems."""
