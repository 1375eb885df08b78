"""Who owns what, decided before anything is built. Pure: no collective, no device."""
