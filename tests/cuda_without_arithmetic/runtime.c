/* A CUDA runtime without arithmetic: it keeps account of device memory, copies, and launches kernels that do nothing.

   Device memory is mapped twice: at the address that the program gets, where any access faults, and at a shadow address,
   where copies go. So a value on the device that the host takes for its own ends the process, as it should.

   NO_ARITHMETIC_MEMORY  bytes of each device, 8 GiB unless given
   NO_ARITHMETIC_DEVICES number of devices, 1 unless given
   NO_ARITHMETIC_ERROR   what every call that needs a driver returns: 35 (old driver), 100 (no device)
   NO_ARITHMETIC_LAUNCH  what the launch of a kernel returns: 209 (no kernel for this card)
   NO_ARITHMETIC_CARD    the card's compute capability times ten, 80 unless given
   NO_ARITHMETIC_LOG     a file for one line per event: its name, the device, bytes, bytes in use on the device */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#undef cudaGetDeviceProperties

#define MOST_DEVICES 16
#define PAGE 4096
#define API __attribute__((visibility("default")))

typedef struct Block {
    char *device, *shadow;
    size_t bytes;
    int owner;
    struct Block *next;
} Block;

static Block *blocks;
static size_t in_use[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static __thread cudaError_t last;

static unsigned long long setting(const char *name, unsigned long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static size_t memory(void) { return setting("NO_ARITHMETIC_MEMORY", 8ull << 30); }
static int capability(void) { return (int)setting("NO_ARITHMETIC_CARD", 80); }
static int devices(void) { return (int)setting("NO_ARITHMETIC_DEVICES", 1); }

static cudaError_t gives(cudaError_t code) {
    if (code) last = code;
    return code;
}

static cudaError_t driver(void) { return gives((cudaError_t)setting("NO_ARITHMETIC_ERROR", 0)); }

static void note(const char *event, int device, size_t bytes) {
    static FILE *file;
    const char *path = getenv("NO_ARITHMETIC_LOG");
    if (!path) return;
    if (!file) file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "%s %d %zu %zu\n", event, device, bytes, in_use[device]);
    fflush(file);
}

/* The block that an address lies in; the caller holds the lock. */
static Block *block_of(const void *address) {
    for (Block *b = blocks; b; b = b->next)
        if ((const char *)address >= b->device && (const char *)address < b->device + b->bytes) return b;
    return NULL;
}

static void *reachable(const void *address) {
    pthread_mutex_lock(&lock);
    Block *b = block_of(address);
    pthread_mutex_unlock(&lock);
    return b ? b->shadow + ((const char *)address - b->device) : (void *)address;
}

/* Memory */

API cudaError_t cudaMalloc(void **made, size_t wanted) {
    *made = NULL;
    if (driver()) return last;
    if (!wanted) return cudaSuccess;
    size_t bytes = (wanted + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&lock);
    if (in_use[current] + bytes > memory()) {
        note("refused", current, wanted);
        pthread_mutex_unlock(&lock);
        return gives(cudaErrorMemoryAllocation);
    }
    int file = memfd_create("device", 0);
    Block *b = calloc(1, sizeof *b);
    if (ftruncate(file, (off_t)bytes)) abort();
    b->device = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    b->shadow = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (b->device == MAP_FAILED || b->shadow == MAP_FAILED) abort();
    close(file);
    b->bytes = bytes;
    b->owner = current;
    b->next = blocks;
    blocks = b;
    in_use[current] += bytes;
    *made = b->device;
    note("allocated", current, bytes);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaFree(void *address) {
    if (!address) return cudaSuccess;
    pthread_mutex_lock(&lock);
    Block **at = &blocks;
    while (*at && (*at)->device != address) at = &(*at)->next;
    Block *b = *at;
    if (!b) {
        pthread_mutex_unlock(&lock);
        return gives(cudaErrorInvalidValue);
    }
    *at = b->next;
    in_use[b->owner] -= b->bytes;
    note("freed", b->owner, b->bytes);
    munmap(b->device, b->bytes);
    munmap(b->shadow, b->bytes);
    free(b);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaMallocFromPoolAsync(void **made, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    return cudaMalloc(made, bytes);
}
API cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
API cudaError_t cudaMallocHost(void **made, size_t bytes) {
    return posix_memalign(made, PAGE, bytes ? bytes : 1) ? gives(cudaErrorMemoryAllocation) : cudaSuccess;
}
API cudaError_t cudaHostAlloc(void **made, size_t bytes, unsigned flags) { return cudaMallocHost(made, bytes); }
API cudaError_t cudaFreeHost(void *address) { free(address); return cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *total = memory();
    *left = *total - in_use[current];
    return driver();
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *told, const void *address) {
    memset(told, 0, sizeof *told);
    told->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    Block *b = block_of(address);
    if (b) {
        told->type = cudaMemoryTypeDevice;
        told->device = b->owner;
        told->devicePointer = (void *)address;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* Copies */

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memmove(reachable(to), reachable(from), bytes);
    note(kind == cudaMemcpyHostToDevice ? "in" : kind == cudaMemcpyDeviceToHost ? "out" : "copied", current, bytes);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    return cudaMemcpy(to, from, bytes, kind);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        memmove((char *)reachable(to) + row * to_pitch, (char *)reachable(from) + row * from_pitch, width);
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    memset(reachable(to), value, bytes);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) { return cudaMemset(to, value, bytes); }

/* Devices */

API cudaError_t cudaGetDeviceCount(int *count) { *count = devices(); return driver(); }
API cudaError_t cudaGetDevice(int *device) { *device = current; return driver(); }
API cudaError_t cudaSetDevice(int device) {
    if (driver()) return last;
    if (device < 0 || device >= devices()) return gives(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *told, int device) {
    if (driver()) return last;
    if (device < 0 || device >= devices()) return gives(cudaErrorInvalidDevice);
    memset(told, 0, sizeof *told);
    strcpy(told->name, "CUDA without arithmetic");
    told->major = capability() / 10;
    told->minor = capability() % 10;
    told->totalGlobalMem = memory();
    told->multiProcessorCount = 16;
    told->warpSize = 32;
    told->maxThreadsPerBlock = told->maxThreadsDim[0] = told->maxThreadsDim[1] = 1024;
    told->maxThreadsDim[2] = 64;
    told->maxThreadsPerMultiProcessor = 2048;
    told->maxGridSize[0] = 0x7fffffff;
    told->maxGridSize[1] = told->maxGridSize[2] = 65535;
    told->regsPerBlock = 65536;
    told->sharedMemPerBlock = 48 << 10;
    told->sharedMemPerBlockOptin = told->sharedMemPerMultiprocessor = 99 << 10;
    told->l2CacheSize = 4 << 20;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 16; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 99 << 10; break;
    default: *value = 0;
    }
    return driver();
}

API cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }

/* Streams and events: there is nothing to wait for */

static cudaError_t handle(void **made) { *made = calloc(1, 64); return driver(); }

API cudaError_t cudaStreamCreate(cudaStream_t *made) { return handle((void **)made); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return handle((void **)made); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *made) { return handle((void **)made); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return handle((void **)made); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaError_t cudaMemPoolCreate(cudaMemPool_t *made, const struct cudaMemPoolProps *p) { return handle((void **)made); }
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

/* Kernels: registered, launched, counted, and not run */

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;

static cudaError_t launched(void) {
    note("launched", current, 0);
    return gives((cudaError_t)setting("NO_ARITHMETIC_LAUNCH", 0));
}

API void **__cudaRegisterFatBinary(void *binary) { static void *none[4]; return none; }
API void __cudaRegisterFatBinaryEnd(void **binary) {}
API void __cudaUnregisterFatBinary(void **binary) {}
API void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *thread,
                                void *block, void *block_size, void *grid, int *warp) {}
API void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t size,
                           int constant, int global) {}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    call.grid = grid; call.block = block; call.shared = shared; call.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid; *block = call.block; *shared = call.shared; *(void **)stream = call.stream;
    return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launched(); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
    return launched();
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *told, const void *function) {
    memset(told, 0, sizeof *told);
    told->maxThreadsPerBlock = 1024;
    told->binaryVersion = told->ptxVersion = 80;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int b, size_t n,
                                                                       unsigned flags) {
    *count = 2;
    return cudaSuccess;
}

/* Errors, in the words of the real runtime */

API cudaError_t cudaGetLastError(void) { cudaError_t code = last; last = cudaSuccess; return code; }
API cudaError_t cudaPeekAtLastError(void) { return last; }
API const char *cudaGetErrorName(cudaError_t code) {
    switch (code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    default: return "cudaErrorUnknown";
    }
}
API const char *cudaGetErrorString(cudaError_t code) {
    switch (code) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    default: return "unknown error";
    }
}
