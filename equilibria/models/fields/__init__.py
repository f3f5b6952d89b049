"""Fields: networks that map coordinates to values of a signal, as equilibria and as explicit layers."""
