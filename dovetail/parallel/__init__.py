"""Who is my neighbour: meshes, Ulysses, balancing, collectives."""
