//! Encryption settings: `sslmode` and the keywords beside it.

use std::path::{Path, PathBuf};

use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};

use super::invalid::invalid;
use super::values::Values;
use crate::Result;
use crate::store::pg::tls::{Revocations, Trust, Verify};

/// TLS settings. `local`: all connections go through Unix sockets, which are not encrypted.
pub(super) fn trust(values: &Values<'_>, local: bool) -> Result<Trust> {
    let given = values.get("sslrootcert");
    let system = given.as_deref() == Some("system");
    let roots = match given {
        Some(_) if system => None,
        Some(path) => Some(PathBuf::from(path)),
        None => values.home_file(".postgresql/root.crt"),
    };
    let verify = verify(values, system, roots.as_deref())?;
    let verify = if local { Verify::Off } else { verify };
    let file = |name: &str, default: &str| {
        values.get(name).map(PathBuf::from).or_else(|| values.home_file(default))
    };
    // As in libpq, a certificate whose file is missing is none: the server may not ask for it. Its key is ignored then.
    let certificate = file("sslcert", ".postgresql/postgresql.crt").filter(|path| path.exists());
    let key = file("sslkey", ".postgresql/postgresql.key");
    let client = match values.word("sslcertmode", &["disable", "allow", "require"])? {
        Some(0) => None,
        Some(2) => {
            return Err(invalid(
                "unsupported sslcertmode: the driver cannot require that the server asks for a certificate",
            ));
        }
        _ if certificate.is_some() && key.is_none() && verify != Verify::Off => {
            return Err(invalid("sslcert is given, and its key is not: give sslkey as well"));
        }
        _ => certificate.zip(key),
    };
    let revocations = Revocations {
        file: file("sslcrl", ".postgresql/root.crl"),
        folder: values.get("sslcrldir").map(PathBuf::from),
    };
    let sni = values.get("sslsni").is_none_or(|value| value.starts_with('1'));
    Ok(Trust { verify, roots, client, revocations, versions: versions(values)?, sni })
}

/// Verification that `sslmode` asks for.
fn verify(values: &Values<'_>, system: bool, roots: Option<&Path>) -> Result<Verify> {
    let words = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"];
    let mode = values.word("sslmode", &words)?;
    if system && !matches!(mode, None | Some(5)) {
        return Err(invalid(
            "sslrootcert=system needs sslmode=verify-full: any public certificate would do otherwise",
        ));
    }
    match mode {
        None if system => Ok(Verify::Full),
        Some(0) => Ok(Verify::Off),
        // libpq's `allow` tries without encryption first. That protects no more than `prefer`, so they are the same
        // here.
        None | Some(1 | 2) => Ok(Verify::Prefer),
        // As in libpq, `require` verifies the server if the file of roots exists.
        Some(3) if roots.is_some_and(Path::exists) => Ok(Verify::Ca),
        Some(3) => Ok(Verify::Encrypt),
        Some(4) if roots.is_some() => Ok(Verify::Ca),
        Some(4) => Err(invalid(
            "sslmode=verify-ca needs sslrootcert: any public certificate would do otherwise",
        )),
        Some(_) => Ok(Verify::Full),
    }
}

/// Versions of TLS between `ssl_min_protocol_version` and `ssl_max_protocol_version`.
fn versions(values: &Values<'_>) -> Result<&'static [&'static SupportedProtocolVersion]> {
    static BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];
    let words = ["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"];
    // libpq ignores the case of a version.
    let bound = |name: &str| -> Result<Option<usize>> {
        let Some(given) = values.get(name) else { return Ok(None) };
        let found = words.iter().position(|word| word.eq_ignore_ascii_case(&given));
        let message = || format!("invalid {name}; supported: {}", words.join(", "));
        found.map(Some).ok_or_else(|| invalid(&message()))
    };
    let least = bound("ssl_min_protocol_version")?.unwrap_or(2);
    let most = bound("ssl_max_protocol_version")?.unwrap_or(3);
    match (least, most) {
        (_, 0 | 1) => Err(invalid(
            "unsupported ssl_max_protocol_version: TLS before 1.2 is unsafe and not supported",
        )),
        (least, most) if least > most => {
            Err(invalid("ssl_min_protocol_version is above ssl_max_protocol_version"))
        }
        (3, _) => Ok(&BOTH[..1]),
        (_, 2) => Ok(&BOTH[1..]),
        _ => Ok(BOTH),
    }
}
