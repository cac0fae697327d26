package image

import (
	"bytes"
	"encoding/pem"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// authoritiesPath is where programs look for the public certificate authorities. They are a file, and not part of the program: those
// of a cluster, in a directory that $SSL_CERT_DIR names, are then known beside them. Roots that a Go program brings itself hold only where it
// finds no others.
const authoritiesPath = "etc/ssl/certs/ca-certificates.crt"

// authorities are the public certificate authorities of Mozilla's list (PEM). One that is trusted up to a date alone is left out: a
// file of certificates cannot say so.
func authorities() []byte {
	var file bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			file.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return file.Bytes()
}
