// A library and a program, so that the listing of commands has an archive and a linked program.
int stoneware_compiler_probe() { return 0; }
