"""What the command line does, one typed function a command. Heavy imports wait inside them: help is instant."""
