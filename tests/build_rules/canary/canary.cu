// Names of internal linkage carry nvcc's module id, which must come from flags, not from the path.
namespace {

struct Local {
  int value;
};

__device__ Local calls;

template <typename T>
__global__ void add(T* values, T addend) {
  atomicAdd(&calls.value, 1);
  values[threadIdx.x].value += addend.value;
}

}  // namespace

void launch(void* values) { add<<<1, 32>>>(static_cast<Local*>(values), Local{1}); }
