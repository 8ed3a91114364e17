int stoneware_compiler_probe();
int main() { return stoneware_compiler_probe(); }
