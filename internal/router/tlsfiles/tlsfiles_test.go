// SPDX-License-Identifier: Apache-2.0

package tlsfiles

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
)

// connect returns the serial number of the certificate that the server presents.
func connect(t *testing.T, server, client *tls.Config) (string, error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ended := make(chan error, 1)
	go func() {
		accepted, err := listener.Accept()
		if err != nil {
			ended <- err
			return
		}
		defer accepted.Close()
		ended <- tls.Server(accepted, server).Handshake()
	}()
	dialed, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer dialed.Close()
	secured := tls.Client(dialed, client)
	err = secured.Handshake()
	if err != nil {
		dialed.Close()
	}
	if serverErr := <-ended; err == nil {
		err = serverErr
	}
	if err != nil {
		return "", err
	}
	return secured.ConnectionState().PeerCertificates[0].SerialNumber.String(), nil
}

func must(t *testing.T, certFile, keyFile, authorities string) *Files {
	t.Helper()
	files, err := New(certFile, keyFile, authorities)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func clientConfig(t *testing.T, files *Files, name string) *tls.Config {
	t.Helper()
	config, err := files.Client(name)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestRenewedCertificate(t *testing.T) {
	dir, authority := t.TempDir(), tlstest.NewAuthority(t)
	certFile, keyFile := authority.Files(dir, "router.example", time.Now().Add(time.Hour))
	files := must(t, certFile, keyFile, "")
	server, client := files.Server("http/1.1"), must(t, "", "", authority.File)
	first, err := connect(t, server, clientConfig(t, client, "router.example"))
	if err != nil {
		t.Fatal(err)
	}
	authority.Files(dir, "router.example", time.Now().Add(2*time.Hour))
	second, err := connect(t, server, clientConfig(t, client, "router.example"))
	if err != nil || second == first {
		t.Errorf("error %v; the renewed certificate is served: %v", err, second != first)
	}
	if err := os.WriteFile(keyFile, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	third, err := connect(t, server, clientConfig(t, client, "router.example"))
	if err != nil || third != second {
		t.Errorf("error %v; the last valid certificate is served: %v", err, third == second)
	}
	if problem := files.problem(time.Now()); problem == nil || !strings.Contains(problem.Error(), keyFile) || strings.Contains(problem.Error(), "broken") {
		t.Errorf("problem %v", problem)
	}
	if _, err := connect(t, server, clientConfig(t, client, "other.example")); err == nil {
		t.Error("a certificate of another name is accepted")
	}
}

func TestMutualTLS(t *testing.T) {
	authority, stranger := tlstest.NewAuthority(t), tlstest.NewAuthority(t)
	certFile, keyFile := authority.Files(t.TempDir(), "engine.example", time.Now().Add(time.Hour))
	server := must(t, certFile, keyFile, authority.File).Server()
	clientCert, clientKey := authority.Files(t.TempDir(), "router", time.Now().Add(time.Hour))
	strangeCert, strangeKey := stranger.Files(t.TempDir(), "router", time.Now().Add(time.Hour))
	for name, tc := range map[string]struct {
		files *Files
		want  bool
	}{
		"known":                 {must(t, clientCert, clientKey, authority.File), true},
		"no certificate":        {must(t, "", "", authority.File), false},
		"of another authority":  {must(t, strangeCert, strangeKey, authority.File), false},
		"server of a stranger":  {must(t, clientCert, clientKey, stranger.File), false},
		"authorities of system": {must(t, clientCert, clientKey, ""), false},
	} {
		if _, err := connect(t, server, clientConfig(t, tc.files, "engine.example")); (err == nil) != tc.want {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestExpiredCertificate checks that an expired certificate is logged once, with its file and time, and served.
func TestExpiredCertificate(t *testing.T) {
	expired := time.Now().Add(-time.Minute)
	certFile, keyFile := tlstest.NewAuthority(t).Files(t.TempDir(), "router.example", expired)
	files := must(t, certFile, keyFile, "")
	if got := files.NotAfter(); got.Unix() != expired.Unix() {
		t.Errorf("expires at %v, want %v", got, expired)
	}
	logged := make(chan string, 100)
	ctx, stop := context.WithCancel(logr.NewContext(t.Context(), funcr.New(func(_, args string) { logged <- args }, funcr.Options{})))
	ended := make(chan struct{})
	go func() { defer close(ended); files.watch(ctx, time.Millisecond) }()
	if line := <-logged; !strings.Contains(line, "has expired at "+expired.UTC().Format("2006")) || !strings.Contains(line, certFile) {
		t.Errorf("log %s", line)
	}
	stop()
	<-ended
	if len(logged) > 0 {
		t.Errorf("logged again: %s", <-logged)
	}
	if _, err := files.Server().GetCertificate(nil); err != nil {
		t.Error(err)
	}
}

// TestHalfWrittenFiles checks that the last valid certificates stay in use while a file is written.
func TestHalfWrittenFiles(t *testing.T) {
	dir, authority, second := t.TempDir(), tlstest.NewAuthority(t), tlstest.NewAuthority(t)
	certFile, keyFile := authority.Files(dir, "router.example", time.Now().Add(time.Hour))
	one, err := os.ReadFile(authority.File)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(second.File)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := os.ReadFile(certFile)
	if err != nil {
		t.Fatal(err)
	}
	authorities := filepath.Join(dir, "authorities.crt")
	put := func(file string, text ...[]byte) {
		t.Helper()
		if err := os.WriteFile(file, bytes.Join(text, nil), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(authorities, one, other)
	put(certFile, leaf, one)
	files := must(t, certFile, keyFile, authorities)
	before, err := files.Authorities.get()
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []int{30, len(other) / 2, len(other) - 3} {
		put(authorities, one, other[:end])
		put(certFile, leaf, one[:len(one)/2])
		pool, err := files.Authorities.get()
		certificate, certErr := files.Identity.get()
		if err != nil || certErr != nil || !pool.Equal(before) || len(certificate.Certificate) != 2 {
			t.Errorf("%d bytes: errors %v and %v", end, err, certErr)
		}
		if problem := files.problem(time.Now()); problem == nil || !strings.Contains(problem.Error(), authorities) || !strings.Contains(problem.Error(), "1 of 2 certificates") {
			t.Errorf("%d bytes: problem %v", end, problem)
		}
	}
	put(authorities, one)
	if pool, err := files.Authorities.get(); err != nil || pool.Equal(before) {
		t.Errorf("the new authorities are not used: %v", err)
	}
}

// TestFutureCertificate checks that a certificate that is not valid yet is reported.
func TestFutureCertificate(t *testing.T) {
	certFile, keyFile := tlstest.NewAuthority(t).Files(t.TempDir(), "router.example", time.Now().Add(time.Hour))
	files := must(t, certFile, keyFile, "")
	if problem := files.problem(time.Now()); problem != nil {
		t.Errorf("problem %v", problem)
	}
	if problem := files.problem(time.Now().Add(-48 * time.Hour)); problem == nil || !strings.Contains(problem.Error(), certFile+" is not valid before ") {
		t.Errorf("problem %v", problem)
	}
}
