//! Channel binding: a hash of the server's certificate, by which a password proves that no other server is in between.

use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256, Sha384, Sha512};

/// Hash of a certificate with the hash function of its signature (RFC 5929, `tls-server-end-point`); `None` if the
/// signature has no such function.
pub(super) fn end_point(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let hash = match signature_algorithm(certificate)? {
        // RFC 5929 replaces MD5 and SHA-1 by SHA-256.
        RSA_MD5 | RSA_SHA1 | ECDSA_SHA1 | RSA_SHA256 | ECDSA_SHA256 => {
            Sha256::digest(certificate).to_vec()
        }
        RSA_SHA384 | ECDSA_SHA384 => Sha384::digest(certificate).to_vec(),
        RSA_SHA512 | ECDSA_SHA512 => Sha512::digest(certificate).to_vec(),
        _ => return None,
    };
    Some(hash)
}

// Object identifiers of signature algorithms, in DER.
const RSA_MD5: &[u8] = b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x04";
const RSA_SHA1: &[u8] = b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x05";
const RSA_SHA256: &[u8] = b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0b";
const RSA_SHA384: &[u8] = b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0c";
const RSA_SHA512: &[u8] = b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0d";
const ECDSA_SHA1: &[u8] = b"\x2a\x86\x48\xce\x3d\x04\x01";
const ECDSA_SHA256: &[u8] = b"\x2a\x86\x48\xce\x3d\x04\x03\x02";
const ECDSA_SHA384: &[u8] = b"\x2a\x86\x48\xce\x3d\x04\x03\x03";
const ECDSA_SHA512: &[u8] = b"\x2a\x86\x48\xce\x3d\x04\x03\x04";

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;

/// Object identifier of the algorithm that signed a certificate. A certificate is the sequence of its body, this
/// algorithm and the signature.
fn signature_algorithm<'a>(certificate: &'a CertificateDer<'_>) -> Option<&'a [u8]> {
    let (fields, _) = element(certificate, SEQUENCE)?;
    let (_, after_body) = element(fields, SEQUENCE)?;
    let (algorithm, _) = element(after_body, SEQUENCE)?;
    Some(element(algorithm, OBJECT_IDENTIFIER)?.0)
}

/// Splits off a DER element with this tag; returns its content and the rest.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
        let digits = Some(digits).filter(|digits| digits.len() <= 4)?;
        (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
    };
    Some(rest.split_at_checked(length)?).filter(|_| found == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_signature() {
        for (oid, length) in [
            (RSA_SHA1, Some(32)),
            (ECDSA_SHA256, Some(32)),
            (RSA_SHA384, Some(48)),
            (ECDSA_SHA512, Some(64)),
            (b"\x2b", None),
        ] {
            let mut algorithm = vec![OBJECT_IDENTIFIER, u8::try_from(oid.len()).unwrap()];
            algorithm.extend_from_slice(oid);
            // A body of 300 bytes, whose length takes two bytes.
            let mut fields = vec![SEQUENCE, 0x82, 0x01, 0x2c];
            fields.resize(4 + 300, 0);
            fields.extend([SEQUENCE, u8::try_from(algorithm.len()).unwrap()]);
            fields.extend(algorithm);
            let [high, low] = u16::try_from(fields.len()).unwrap().to_be_bytes();
            let mut certificate = vec![SEQUENCE, 0x82, high, low];
            certificate.extend(fields);
            let hash = end_point(&certificate.clone().into());
            assert_eq!(hash.map(|hash| hash.len()), length);
            for cut in 0..certificate.len() {
                let _ = end_point(&certificate[..cut].into());
            }
        }
    }
}
