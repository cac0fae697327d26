// SPDX-License-Identifier: Apache-2.0

// Package tlsfiles provides TLS configurations from PEM files, which cert-manager or a Secret volume renews.
//
// Invariants:
//   - Files are read again for each handshake: a renewed certificate needs no restart.
//   - Invalid files are an error at the start. Later, the last valid content stays in use, and Problems names the file.
//   - A private key appears in no error.
package tlsfiles
