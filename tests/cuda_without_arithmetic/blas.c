/* cuBLAS without arithmetic. Functions that are not here succeed and do nothing (cuda_libraries.py). */
#include <stdlib.h>

int cublasCreate_v2(void **made) { *made = calloc(1, 64); return 0; }
int cublasDestroy_v2(void *handle) { free(handle); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
const char *cublasGetStatusName(int status) { return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : "CUBLAS_STATUS"; }
const char *cublasGetStatusString(int status) { return cublasGetStatusName(status); }
