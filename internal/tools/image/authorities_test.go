// SPDX-License-Identifier: Apache-2.0

package image

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// TestAuthorities verifies that the file has the authorities of S3 and other common services, and no authority that is
// trusted only up to a date.
func TestAuthorities(t *testing.T) {
	var names []string
	partly := map[string]bool{}
	for root := range bundle.Roots() {
		partly[string(root.Certificate)] = root.Constraint != nil
	}
	for rest := authorities(); len(rest) > 0; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			t.Fatalf("%d trailing bytes are not a certificate", len(rest))
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		if !certificate.IsCA || partly[string(block.Bytes)] {
			t.Errorf("%s is an authority: %v, trusted in part: %v", certificate.Subject, certificate.IsCA, partly[string(block.Bytes)])
		}
		names = append(names, certificate.Subject.CommonName)
	}
	for _, name := range []string{"Amazon Root CA 1", "ISRG Root X1", "GTS Root R1", "DigiCert Global Root G2"} {
		if !slices.Contains(names, name) {
			t.Errorf("%s is missing", name)
		}
	}
	if len(names) < 100 {
		t.Errorf("%d authorities", len(names))
	}
}

// TestAuthoritiesOfACluster verifies that a program in the image trusts the public authorities, and those in the
// directory $SSL_CERT_DIR.
func TestAuthoritiesOfACluster(t *testing.T) {
	const wanted = "IMAGE_TEST_AUTHORITIES" // path of a file with the expected roots of the child process, because a process reads its roots only once
	if file := os.Getenv(wanted); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := x509.NewCertPool()
		want.AppendCertsFromPEM(text)
		if got, err := x509.SystemCertPool(); err != nil || !got.Equal(want) {
			t.Errorf("the authorities of the process differ from those in %s: %v", file, err)
		}
		return
	}
	server := httptest.NewTLSServer(nil)
	t.Cleanup(server.Close)
	private := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	directory, empty := t.TempDir(), t.TempDir()
	image, all := filepath.Join(t.TempDir(), "ca-certificates.crt"), filepath.Join(t.TempDir(), "all.crt")
	for file, text := range map[string][]byte{
		image: authorities(), filepath.Join(directory, "ca.crt"): private, all: slices.Concat(authorities(), private),
	} {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for directory, want := range map[string]string{directory: all, empty: image} {
		command := exec.Command(os.Args[0], "-test.run=^TestAuthoritiesOfACluster$")
		command.Env = []string{"SSL_CERT_FILE=" + image, "SSL_CERT_DIR=" + directory, wanted + "=" + want}
		if output, err := command.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, output)
		}
	}
}
