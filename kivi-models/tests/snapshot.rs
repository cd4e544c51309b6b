//! Snapshots of sessions: saved on one backend, restored on another, and continued as if nothing had
//! happened.

use kivi_core::{
    Bits, CacheConfig, CacheConfigBuilder, DecoderBackend, Error as CoreError, Format, LayerSpec,
    SequenceId, Snapshot, SnapshotError, StoreDtype, ValueResidual,
};
use kivi_cpu::Cpu;
use kivi_cpu_ref::CpuRef;
use kivi_models::{Checkpoint, Error, KeyBiasMode, Llama, Session};
use std::path::PathBuf;

const MODEL: &str = "llama3-tiny";
const CONTEXT: usize = 512;
/// Tokens after the prompt.
const GENERATED: usize = 24;

fn checkpoint(name: &str) -> Checkpoint {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    Checkpoint::open(models.join(name)).unwrap()
}

/// A prompt of any length, of tokens that every tiny model has.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i * i + 7 * i + 3) % 61).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&x| x == best).unwrap() as u32
}

fn small() -> CacheConfigBuilder {
    CacheConfig::builder().group_size(16).residual_length(32)
}

/// Every format, and everything a configuration can turn.
fn caches() -> Vec<(&'static str, CacheConfigBuilder)> {
    let over = |bits, store| Format::new(Some(bits), store);
    let promoted = Format::KIVI2.promote(0.25).unwrap();
    let both = |format: Format| small().key(format).value(format);
    vec![
        ("kivi2", both(Format::KIVI2)),
        ("kivi4", both(Format::KIVI4)),
        ("kivi8", both(Format::KIVI8)),
        ("f16", both(Format::F16)),
        ("bf16", both(Format::BF16)),
        ("f32", both(Format::F32)),
        ("kivi2+", small().key(promoted).value(Format::KIVI2).sink_length(5)),
        ("over bf16", both(over(Bits::Two, StoreDtype::Bf16))),
        ("over f32", both(over(Bits::Four, StoreDtype::F32))),
        ("full keys", small().key(Format::F16).value(Format::KIVI2)),
        ("full values", small().key(Format::KIVI4).value(Format::F32).sink_length(40)),
        ("blocks", both(Format::KIVI2).value_residual(ValueResidual::Block)),
        ("rollback", both(Format::KIVI2).rollback_length(20).sink_length(3)),
        ("segments", both(Format::KIVI2).segment_tokens(Some(32))),
    ]
}

/// Layers of unlike formats.
fn mixed(layers: &mut [LayerSpec]) {
    for (index, layer) in layers.iter_mut().enumerate() {
        if index % 2 == 1 {
            layer.format.keys = Format::KIVI2.promote(0.5).unwrap();
            layer.format.values = Format::BF16;
        }
    }
}

fn session<B: DecoderBackend>(model: &Llama<B>, config: CacheConfig) -> Session<B> {
    Session::new(model, config, 2, CONTEXT).unwrap()
}

/// The prompt and some greedy tokens; the tokens in the cache and the logits after them.
fn begin<B: DecoderBackend>(
    session: &mut Session<B>,
    length: usize,
) -> (SequenceId, Vec<u32>, Vec<f32>) {
    let sequence = session.create_sequence().unwrap();
    let mut tokens = prompt(length);
    let mut logits = session.prompt(sequence, &tokens).unwrap();
    for _ in 0..5 {
        let token = argmax(&logits);
        tokens.push(token);
        logits = session.generate_step(&[(sequence, &[token])]).unwrap();
    }
    (sequence, tokens, logits)
}

/// Greedy tokens from the next one on, a prompt in between, and all logits.
fn go_on<B: DecoderBackend>(
    session: &mut Session<B>,
    sequence: SequenceId,
    next: u32,
) -> (Vec<u32>, Vec<f32>) {
    let (mut tokens, mut all) = (vec![next], Vec::new());
    for i in 0..GENERATED {
        let logits = if i == GENERATED / 2 {
            session.prompt(sequence, &prompt(37)).unwrap()
        } else {
            session.generate_step(&[(sequence, &tokens[tokens.len() - 1..])]).unwrap()
        };
        tokens.push(argmax(&logits));
        all.extend(logits);
    }
    (tokens, all)
}

fn written(snapshot: &Snapshot) -> Vec<u8> {
    let mut bytes = Vec::new();
    snapshot.write_to(&mut bytes).unwrap();
    bytes
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Saved on `from`, restored on `to`, and there: the file again, and `to`'s own continuation.
fn moves<A: DecoderBackend, B: DecoderBackend>(
    what: &str,
    (from, to): (&Llama<A>, &Llama<B>),
    mut source: Session<A>,
    mut target: Session<B>,
    length: usize,
) {
    let (sequence, tokens, logits) = begin(&mut source, length);
    let bytes = written(&source.snapshot(sequence, &tokens).unwrap());
    let snapshot = Snapshot::read_from(bytes.as_slice()).unwrap();
    assert_eq!(snapshot.header().model, *from.identity(), "{what}");

    // In a pool where another sequence lives and one has left, so that places are used again.
    let other = target.create_sequence().unwrap();
    target.prompt(other, &prompt(70)).unwrap();
    let gone = target.create_sequence().unwrap();
    target.prompt(gone, &prompt(90)).unwrap();
    target.state_mut().remove(gone).unwrap();
    let restored = target.restore(&snapshot).unwrap();
    assert!(written(&target.snapshot(restored, &tokens).unwrap()) == bytes, "{what}: not the same");

    let next = argmax(&logits);
    let (expected, expected_logits) = go_on(&mut source, sequence, next);
    let (found, found_logits) = go_on(&mut target, restored, next);
    assert_eq!(found, expected, "{what}: greedy tokens");
    if from.backend().capabilities().name == to.backend().capabilities().name {
        assert!(same_bits(&found_logits, &expected_logits), "{what}: logits");
    }
}

#[test]
fn sequences_go_on_where_they_are_restored() {
    let checkpoint = checkpoint(MODEL);
    let cpu = Llama::load(Cpu::new(2).unwrap(), &checkpoint).unwrap();
    let reference = Llama::load(CpuRef, &checkpoint).unwrap();
    for (what, builder) in caches() {
        let config = builder.build().unwrap();
        // Shorter than the residual; on a boundary; with codes.
        for length in [1, 27, 64, 110] {
            let what = format!("{what}, {length} tokens");
            let [one, two] = [(); 2].map(|()| session(&cpu, config.clone()));
            moves(&what, (&cpu, &cpu), one, two, length);
            let (one, two) = (session(&cpu, config.clone()), session(&reference, config.clone()));
            moves(&what, (&cpu, &reference), one, two, length);
        }
        let (one, two) = (session(&reference, config.clone()), session(&cpu, config.clone()));
        moves(what, (&reference, &cpu), one, two, 75);
    }
    let config = small().build().unwrap();
    let mut layers = cpu.cache_layers(&config);
    mixed(&mut layers);
    let of = |config: &CacheConfig| (config.clone(), layers.clone());
    let (config, layers) = of(&config);
    let one = Session::with_layers(&cpu, config.clone(), layers.clone(), 2, CONTEXT).unwrap();
    let two = Session::with_layers(&reference, config, layers, 2, CONTEXT).unwrap();
    moves("mixed layers", (&cpu, &reference), one, two, 100);
}

/// Pages of another size; a shorter rollback, under which fewer copies are kept.
#[test]
fn what_does_not_change_the_contents_may_differ() {
    let model = Llama::load(Cpu::new(2).unwrap(), &checkpoint(MODEL)).unwrap();
    let saved = small().rollback_length(24).page_tokens(16).build().unwrap();
    for length in [20, 64, 110] {
        let mut source = session(&model, saved.clone());
        let (sequence, tokens, logits) = begin(&mut source, length);
        let snapshot = source.snapshot(sequence, &tokens).unwrap();
        for (rollback, page) in [(24, 32), (23, 16), (7, 32), (0, 16)] {
            let config = small().rollback_length(rollback).page_tokens(page).build().unwrap();
            let mut target = session(&model, config.clone());
            let restored = target.restore(&snapshot).unwrap();
            // The same as if it had been computed under that configuration.
            let mut own = session(&model, config);
            let (own_sequence, ..) = begin(&mut own, length);
            let expected = written(&own.snapshot(own_sequence, &tokens).unwrap());
            let found = written(&target.snapshot(restored, &tokens).unwrap());
            assert!(found == expected, "{length} tokens, rollback {rollback}, pages of {page}");
            // As many tokens as that rollback promises can be taken back.
            target.state_mut().truncate(restored, tokens.len() - rollback).unwrap();
            own.state_mut().truncate(own_sequence, tokens.len() - rollback).unwrap();
            let next = argmax(&logits);
            let (found, expected) =
                (go_on(&mut target, restored, next), go_on(&mut own, own_sequence, next));
            assert!(found.0 == expected.0 && same_bits(&found.1, &expected.1));
        }
    }
}

#[test]
fn states_that_cannot_be_adopted_are_refused() {
    let model = Llama::load(Cpu::new(1).unwrap(), &checkpoint(MODEL)).unwrap();
    let mut session = session(&model, small().rollback_length(8).build().unwrap());
    let sequence = session.create_sequence().unwrap();
    let tokens = prompt(100);
    let error = session.snapshot(sequence, &[]).unwrap_err();
    assert_eq!(error.to_string(), "snapshot: the sequence is empty");
    session.state_mut().begin_prompt(sequence, 100).unwrap();
    session.generate_step(&[(sequence, &tokens[..60])]).unwrap();
    let refusal = |session: &Session<Cpu>, tokens: &[u32]| {
        let error = session.snapshot(sequence, tokens).unwrap_err();
        assert!(matches!(error, Error::Core(CoreError::InvalidRequest { .. })), "{error}");
        error.to_string()
    };
    assert_eq!(
        refusal(&session, &tokens[..60]),
        "snapshot: the sequence is within a prompt segment: keys quantized up to 0, and up to 32 at \
         its end"
    );
    session.generate_step(&[(sequence, &tokens[60..])]).unwrap();
    assert!(session.snapshot(sequence, &tokens).is_ok());
    assert_eq!(
        refusal(&session, &tokens[..99]),
        "snapshot: 99 token ids for a sequence of 100 tokens"
    );
    session.state_mut().truncate(sequence, 93).unwrap();
    assert!(
        refusal(&session, &tokens[..93]).contains("truncated less than its rollback length of 8")
    );
    // A few tokens later the copies are those of any other sequence.
    let mut tokens = tokens[..93].to_vec();
    for token in prompt(8) {
        session.generate_step(&[(sequence, &[token])]).unwrap();
        tokens.push(token);
    }
    assert!(session.snapshot(sequence, &tokens).is_ok());
    session.state_mut().remove(sequence).unwrap();
    assert!(refusal(&session, &tokens).contains("no such sequence"));
}

#[test]
fn a_refused_snapshot_leaves_the_session_as_it_was() {
    let checkpoint = checkpoint(MODEL);
    let model = Llama::load(Cpu::new(2).unwrap(), &checkpoint).unwrap();
    let config = || small().build().unwrap();
    let mut source = session(&model, config());
    let (sequence, tokens, logits) = begin(&mut source, 90);
    let snapshot = source.snapshot(sequence, &tokens).unwrap();
    let bytes = written(&snapshot);

    let others = ["llama2-tiny", "mistral-tiny", "llama3-tiny.gguf"];
    for (number, name) in others.into_iter().enumerate() {
        let other = Llama::load(CpuRef, &self::checkpoint(name)).unwrap();
        let mut session = session(&other, config());
        let error = session.restore(&snapshot).unwrap_err();
        let Error::Core(CoreError::Snapshot(error)) = error else { panic!("{error}") };
        assert!(matches!(error, SnapshotError::OtherModel { .. }), "{number}: {error}");
    }
    let mut other = session(&model, small().sink_length(1).build().unwrap());
    let error = other.restore(&snapshot).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::Snapshot(SnapshotError::OtherCache { .. }))),
        "{error}"
    );
    // Tokens that the model does not have.
    let mut header = snapshot.header().clone();
    header.tokens[3] = model.config().vocab_size as u32;
    let strange = Snapshot::new(header, snapshot.layers().to_vec()).unwrap();
    let error = source.restore(&strange).unwrap_err();
    assert!(
        matches!(error, Error::Core(CoreError::Snapshot(SnapshotError::Invalid { .. }))),
        "{error}"
    );

    // A pool with too few pages, and one without a slot.
    let mut tight = Session::new(&model, config(), 1, 32).unwrap();
    let error = tight.restore(&snapshot).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::PoolExhausted { .. })), "{error}");
    let second = source.restore(&snapshot).unwrap();
    let error = source.restore(&snapshot).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::PoolExhausted { .. })), "{error}");
    source.state_mut().remove(second).unwrap();

    // Damaged files do not even come to a session; its sequences go on.
    for at in (0..bytes.len()).step_by(bytes.len() / 50) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(Snapshot::read_from(damaged.as_slice()).is_err(), "byte {at}");
    }
    let mut own = session(&model, config());
    let (own_sequence, ..) = begin(&mut own, 90);
    let next = argmax(&logits);
    let (found, expected) =
        (go_on(&mut source, sequence, next), go_on(&mut own, own_sequence, next));
    assert!(found.0 == expected.0 && same_bits(&found.1, &expected.1));
}

#[test]
fn fingerprints_tell_models_apart() {
    let names = ["llama2-tiny", "llama3-tiny", "mistral-tiny", "llama3-tiny.gguf"];
    let prints = names.map(|name| checkpoint(name).fingerprint());
    for (i, a) in prints.iter().enumerate() {
        assert!(prints[..i].iter().all(|b| a != b), "{}", names[i]);
        assert_eq!(*a, checkpoint(names[i]).fingerprint());
    }
    let model = Llama::load_with(CpuRef, &checkpoint(MODEL), KeyBiasMode::InKeys).unwrap();
    assert_eq!(model.fingerprint(), prints[1]);
}
