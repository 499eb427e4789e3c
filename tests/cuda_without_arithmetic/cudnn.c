/* cuDNN without arithmetic. Functions that are not here succeed and do nothing, or make a handle (build.py). */
#include <stddef.h>
#include <stdlib.h>

size_t cudnnGetVersion(void) { return 91000; }
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS" : "CUDNN_STATUS_SUCCESS"; }
int cudnnBackendCreateDescriptor(int kind, void **made) { *made = calloc(1, 64); return 0; }
int cudnnGetReductionIndicesSize(void *h, void *r, void *a, void *c, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetReductionWorkspaceSize(void *h, void *r, void *a, void *c, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y, int algorithm, size_t *bytes) {
    *bytes = 0;
    return 0;
}
int cudnnDropoutGetStatesSize(void *h, size_t *bytes) { *bytes = 64; return 0; }
int cudnnGetRNNTempSpaceSizes(void *h, void *r, int mode, void *x, size_t *work, size_t *reserve) {
    if (work) *work = 0;
    if (reserve) *reserve = 0;
    return 0;
}
