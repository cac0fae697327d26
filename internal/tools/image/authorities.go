// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"encoding/pem"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// authoritiesPath is the path of the certificates of public certificate authorities. They are in a file, not in the
// program, so that $SSL_CERT_DIR can add the certificates of a cluster: a Go program uses embedded root certificates
// only if it finds no others.
const authoritiesPath = "etc/ssl/certs/ca-certificates.crt"

// authorities returns the certificates of Mozilla's list of public certificate authorities, as PEM. It omits
// authorities that are trusted only up to a date, because a certificate file cannot express the date.
func authorities() []byte {
	var file bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			file.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return file.Bytes()
}
