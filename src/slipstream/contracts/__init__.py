"""Values that pass between scheduler, runner, engine and front end: numpy and plain structs."""
