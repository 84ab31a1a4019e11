"""Memory and SSDs as one store: a library without sockets. README.md lists the files."""
