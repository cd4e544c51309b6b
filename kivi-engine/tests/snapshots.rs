//! Prefixes in files: from one backend's engine to another's, and what is refused.

mod common;

use common::{Random, alone, layers, model, model_on, small};
use kivi_core::{CacheConfig, DecoderBackend, Snapshot};
use kivi_cpu_ref::CpuRef;
use kivi_engine::{Completion, Engine, Request};
use kivi_models::Llama;

fn engine<B: DecoderBackend>(model: &Llama<B>, config: &CacheConfig) -> Engine<B> {
    let layers = model.cache_layers(config);
    Engine::builder(model).cache(config.clone(), layers).kv_memory(1 << 20).build().unwrap()
}

fn answer<B: DecoderBackend>(engine: &mut Engine<B>, request: &Request) -> Completion {
    let events = engine.submit(request.clone()).unwrap();
    engine.run().unwrap();
    engine.audit().unwrap();
    events.collect_now().unwrap().remove(0)
}

#[test]
fn a_prefix_moves_to_another_backend() {
    let fast = model(2);
    let config = small().sink_length(4).build().unwrap();
    assert_eq!(layers(&fast, &config).len(), 2);
    let request = Request::new(Random::new(3).tokens(220), 40);
    let mut first = engine(&fast, &config);
    assert!(first.snapshot_prefix(&request.prompt).unwrap().is_none());
    let expected = answer(&mut first, &request);
    assert_eq!(expected, alone(&fast, &config, &request)[0]);
    let snapshot = first.snapshot_prefix(&request.prompt).unwrap().unwrap();
    assert_eq!(snapshot.tokens(), &request.prompt[..4 + 3 * 64]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prefix.kivi");
    snapshot.save(&file).unwrap();

    // On the reference, and on the same backend in a later process.
    let loaded = Snapshot::load(&file).unwrap();
    let slow = model_on(CpuRef, "llama3-tiny");
    let mut second = engine(&slow, &config);
    second.restore_prefix(&loaded).unwrap();
    second.audit().unwrap();
    assert_eq!(answer(&mut second, &request), expected);
    assert_eq!(second.stats().reused_tokens, 4 + 3 * 64);
    let mut third = engine(&fast, &config);
    third.restore_prefix(&loaded).unwrap();
    third.restore_prefix(&loaded).unwrap();
    assert_eq!(third.stats().prefixes, 1);
    assert_eq!(answer(&mut third, &request), expected);
    assert_eq!(third.snapshot_prefix(&request.prompt).unwrap().unwrap(), snapshot);
}

#[test]
fn wrong_files_leave_the_engine_working() {
    let (right, wrong) = (model(1), model_on(CpuRef, "llama2-tiny"));
    let config = small().build().unwrap();
    let request = Request::new(Random::new(4).tokens(150), 20);
    let mut engine_of = engine(&right, &config);
    let expected = answer(&mut engine_of, &request);
    let mut bytes = Vec::new();
    let snapshot = engine_of.snapshot_prefix(&request.prompt).unwrap().unwrap();
    snapshot.write_to(&mut bytes).unwrap();

    let mut random = Random::new(9);
    let header = 200.min(bytes.len());
    let places: Vec<_> = (0..header).chain((0..200).map(|_| random.below(bytes.len()))).collect();
    for place in places {
        let mut damaged = bytes.clone();
        damaged[place] ^= 1 << random.below(8);
        let error = Snapshot::read_from(&damaged[..]).unwrap_err().to_string();
        assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        assert!(Snapshot::read_from(&bytes[..place]).is_err(), "cut at {place}");
    }
    // Another model, another cache, an end within a segment, a pool that is too small.
    assert!(engine(&wrong, &config).restore_prefix(&snapshot).is_err());
    let other = small().residual_length(64).build().unwrap();
    assert!(engine(&right, &other).restore_prefix(&snapshot).is_err());
    let coarse = small().segment_tokens(Some(96)).build().unwrap();
    let error = engine(&right, &coarse).restore_prefix(&snapshot).unwrap_err().to_string();
    assert_eq!(error, "invalid request: 128 tokens are no whole number of segments");
    let layers = right.cache_layers(&config);
    let builder = Engine::builder(&right).cache(config.clone(), layers).kv_memory(5_000);
    let mut tiny = builder.build().unwrap();
    assert!(tiny.restore_prefix(&snapshot).is_err());
    tiny.audit().unwrap();

    assert_eq!(answer(&mut engine_of, &request), expected);
}
