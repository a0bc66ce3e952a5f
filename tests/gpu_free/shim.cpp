// Tells a CPU build of torch that there is one CUDA device, which does nothing: a backward pass of tensors that claim to
// be there would end the process without hooks and a guard.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct PretendedHooks : at::CUDAHooksInterface {
  explicit PretendedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)

struct PretendedGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device one() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, one()); }
  c10::Device exchangeDevice(c10::Device) const override { return one(); }
  c10::Device getDevice() const override { return one(); }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);
