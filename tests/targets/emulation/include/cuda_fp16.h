// In place of CUDA's: cuda_language.h, which is included before everything, has what is needed.
