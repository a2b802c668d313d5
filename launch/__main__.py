"""`python -m launch` is the command line; under torchrun, `-m launch FILE` measures what FILE has for its ranks."""

from launch.cli import main

if __name__ == "__main__":
    main()
