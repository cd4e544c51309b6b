//! A GGUF file is read or refused; whatever is read lies inside it.
#![no_main]

use kivi_models::ModelConfig;
use kivi_models::checkpoint::{Gguf, GgufVocabulary, Value};
use kivi_models::config::GenerationDefaults;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let gguf = match Gguf::parse(file.to_vec().into()) {
        Ok(gguf) => gguf,
        Err(error) => return assert!(!error.to_string().contains('\n')),
    };
    for value in gguf.metadata().values() {
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in gguf.tensors() {
        assert!(!tensor.bytes.is_empty() && tensor.bytes.len() < file.len());
        assert!(tensor.shape.iter().all(|&dimension| dimension > 0));
    }
    if let Ok(config) = ModelConfig::from_gguf(&gguf) {
        config.validate().expect("a configuration that was read is valid");
    }
    let _ = GenerationDefaults::from_gguf(&gguf);
    if let Ok(Some(vocabulary)) = GgufVocabulary::from_gguf(&gguf) {
        for id in [vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id] {
            assert!(id.is_none_or(|id| (id as usize) < vocabulary.tokens.len()));
        }
    }
});
