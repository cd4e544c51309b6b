//! What goes wrong on a device: it is reported by name, and the device goes on working.

use kivi_core::{
    CacheBackend, CacheConfig, CacheState, Error, LayerSpec, PoolSpec, StepPlan, StepRequest,
};
use kivi_cpu_ref::parity::{basic_cases, check};
use kivi_wgpu::{GpuOptions, OpenError, Wgpu, WgpuOptions, open};

fn device(wgsl: bool, gpu: GpuOptions) -> Option<Wgpu> {
    match open(&WgpuOptions { wgsl, gpu, ..WgpuOptions::default() }) {
        Err(error @ OpenError::NoDevice) => {
            println!("skipped: {error}");
            None
        }
        other => Some(other.unwrap_or_else(|error| panic!("{error}"))),
    }
}

/// A step of `tokens` tokens on a new pool.
fn first_step(backend: &Wgpu, tokens: usize) -> Result<(), Error> {
    let config = CacheConfig::builder().build()?;
    let layer = LayerSpec::new(&config, 2, 64);
    let spec = PoolSpec::for_context(config, vec![layer], 1, tokens)?;
    let mut cache = backend.create_cache(&spec)?;
    let mut state = CacheState::new(spec);
    let sequence = state.create_sequence()?;
    state.begin_prompt(sequence, tokens)?;
    let mut plan = StepPlan::default();
    state.plan(&[StepRequest { sequence, tokens }], &mut plan)?;
    backend.begin_step(&mut cache, &plan)
}

#[test]
fn a_pool_that_does_not_fit_is_refused_and_a_smaller_one_works() {
    let gpu = GpuOptions { layer_bytes: Some(256 << 10), ..GpuOptions::default() };
    let Some(backend) = device(false, gpu) else { return };
    let error = first_step(&backend, 2000).unwrap_err();
    assert!(matches!(error, Error::Device { operation: "begin step", .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("out of device memory") && text.contains("262144"), "{text}");
    assert!(!text.contains('\n'), "{text}");
    first_step(&backend, 200).unwrap();
    check(&backend, &basic_cases()[5], 0.0).unwrap();
}

#[test]
fn a_kernel_that_does_not_compile_is_reported_with_its_name() {
    // WGSL cannot read a word as two halves; SPIR-V can.
    let Some(backend) = device(true, GpuOptions::default()) else { return };
    let error = backend.reads_pairs().unwrap_err().to_string();
    assert!(error.contains("kernel pairs failed"), "{error}");
    assert!(!error.contains('\n'), "{error}");
    // The device is as good as before.
    check(&backend, &basic_cases()[5], 0.0).unwrap();
}

#[cfg(feature = "vulkan")]
#[test]
fn spir_v_reads_pairs() {
    let Some(backend) = device(false, GpuOptions::default()) else { return };
    assert!(backend.reads_pairs().unwrap());
}

#[test]
fn the_form_of_codes_follows_the_self_test() {
    for (denormals, form) in [(true, "codes as denormals"), (false, "codes converted")] {
        let gpu = GpuOptions { denormals: Some(denormals), ..GpuOptions::default() };
        let Some(backend) = device(false, gpu) else { return };
        assert!(backend.capabilities().device.contains(form), "{}", backend.capabilities().device);
        check(&backend, &basic_cases()[5], 0.0).unwrap();
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let found = kivi_wgpu::adapters().len();
    let error = open(&WgpuOptions { adapter: Some(1000), ..WgpuOptions::default() }).unwrap_err();
    match error {
        OpenError::NoDevice => assert_eq!(found, 0),
        other => assert_eq!(
            other.to_string(),
            format!("no device 1000; there are {found} (numbered from 0)")
        ),
    }
}
