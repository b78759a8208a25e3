"""An example of a package of plug-ins for mrl; docs/extending.md explains it."""
