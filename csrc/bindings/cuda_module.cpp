// bucketwheel._cuda: hands the table of cuda_api.h over as the capsule `api`. It binds no class, so it is plain C API.
#include <Python.h>

#include "bindings/cuda_table.h"

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_cuda",
                          "The CUDA kernels of bucketwheel, as a table for bucketwheel._cpu.",
                          0,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming): Python looks for this name
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  const bucketwheel::CudaApi& api = bucketwheel::cuda_table();
  PyObject* capsule = PyCapsule_New(const_cast<bucketwheel::CudaApi*>(&api), bucketwheel::kCudaApiCapsule, nullptr);
  if (capsule == nullptr || PyModule_AddObject(module, "api", capsule) != 0) {
    Py_XDECREF(capsule);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
