/* The kernels of `amx` on a CPU without a tile unit, float32; NULL where its vectors are not there, either. */
const fastattn_kernels *emulated_amx(void);
