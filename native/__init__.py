"""The C++ that must exist: device runtimes that TVM's wheel lacks, compiled on first use."""
