"""Models of graphs: implicit graph networks and graph convolutions."""
