//! Packages of the system.

use crate::shell::{command, output, run, succeeds};

/// Installs packages if this is root on Debian; what is missing afterwards is for the caller to see.
pub(crate) fn install(packages: &[&str]) {
    let root = output(command("id", &["-u"])).is_ok_and(|id| id.trim() == "0");
    if !root || !succeeds("apt-get", &["--version"]) {
        return;
    }
    let apt = |arguments: &[&str]| {
        let mut apt = command("apt-get", arguments);
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        run(apt).is_ok()
    };
    let install = [&["install", "-qq", "--yes", "--no-install-recommends"], packages].concat();
    // The lists of packages may be missing or old: fetch them, then try again.
    let _installed = apt(&install) || apt(&["update", "-qq"]) && apt(&install);
}
