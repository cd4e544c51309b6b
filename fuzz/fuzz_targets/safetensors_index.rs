//! The index of a sharded checkpoint never names a file outside its directory.
#![no_main]

use kivi_models::checkpoint::ShardIndex;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|json: &[u8]| match ShardIndex::parse(json) {
    Ok(index) =>
        for file in index.files() {
            let path = Path::new("/model").join(file);
            assert_eq!(path.parent(), Some(Path::new("/model")));
            assert_eq!(path.file_name(), Some(file.as_ref()));
        },
    Err(error) => assert!(!error.to_string().contains('\n')),
});
