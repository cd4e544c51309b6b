//! The configuration files of a model directory give valid values or an error.
#![no_main]

use kivi_models::ModelConfig;
use kivi_models::checkpoint::TokenizerConfig;
use kivi_models::config::GenerationDefaults;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|json: &[u8]| {
    match ModelConfig::from_hf_json(json) {
        Ok(config) => {
            config.validate().expect("a configuration that was read is valid");
            for name in config.weight_names().take(100) {
                let [rows, columns] = config.weight_shape(name).expect("the model has this weight");
                assert!(rows.checked_mul(columns).is_some_and(|elements| elements > 0));
            }
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
    let _ = GenerationDefaults::from_json(json);
    let _ = TokenizerConfig::from_json(json);
});
