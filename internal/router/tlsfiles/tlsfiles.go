// SPDX-License-Identifier: Apache-2.0

package tlsfiles

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// maxFileBytes bounds a PEM file. It exceeds the public authorities of an operating system.
const maxFileBytes = 1 << 20

// watched is a value that is parsed from files.
type watched[T any] struct {
	files []string
	parse func(texts [][]byte) (T, error)

	mu      sync.Mutex
	texts   [][]byte
	value   T
	valid   bool
	problem error
}

// get returns the value of the files, or the last valid one if they are invalid now.
func (w *watched[T]) get() (T, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.problem = w.update(); w.valid {
		return w.value, nil
	}
	return w.value, w.problem
}

func (w *watched[T]) update() error {
	var texts [][]byte
	for _, file := range w.files {
		text, err := regularfile.Read(file, maxFileBytes)
		if err != nil {
			return err
		}
		texts = append(texts, text)
	}
	same := w.valid
	for i := range w.texts {
		same = same && bytes.Equal(texts[i], w.texts[i])
	}
	if same {
		return nil
	}
	value, err := w.parse(texts)
	if err != nil {
		return fmt.Errorf("%s is invalid: %w", strings.Join(w.files, " with "), err)
	}
	w.texts, w.value, w.valid = texts, value, true
	return nil
}

// Identity is a certificate with its private key.
type Identity struct{ watched[*tls.Certificate] }

// NewIdentity reads a certificate, with its chain, and its key.
func NewIdentity(certFile, keyFile string) (*Identity, error) {
	i := &Identity{watched[*tls.Certificate]{files: []string{certFile, keyFile}, parse: func(texts [][]byte) (*tls.Certificate, error) {
		certificate, err := tls.X509KeyPair(texts[0], texts[1])
		return &certificate, cmp.Or(err, checkComplete(texts[0]))
	}}}
	if _, err := i.get(); err != nil {
		return nil, fmt.Errorf("failed to load certificate %q with key %q: %w", certFile, keyFile, err)
	}
	return i, nil
}

// NewAuthorities reads the certificates of authorities.
func NewAuthorities(file string) (*Authorities, error) {
	a := &Authorities{watched[*x509.CertPool]{files: []string{file}, parse: func(texts [][]byte) (*x509.CertPool, error) {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(texts[0]) {
			return nil, errors.New("it must contain PEM certificates of authorities, at most 1 MiB")
		}
		return pool, checkComplete(texts[0])
	}}}
	if _, err := a.get(); err != nil {
		return nil, err
	}
	return a, nil
}

// checkComplete rejects a PEM file that ends within a certificate, because it is being written. The parsers of the
// standard library skip such a certificate.
func checkComplete(text []byte) error {
	begun, complete := bytes.Count(text, []byte("-----BEGIN CERTIFICATE-----")), 0
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == "CERTIFICATE" {
			complete++
		}
	}
	if complete < begun {
		return fmt.Errorf("%d of %d certificates are incomplete", begun-complete, begun)
	}
	return nil
}

// Authorities are certificates that verify others.
type Authorities struct{ watched[*x509.CertPool] }

// Files are the files of one side of TLS connections. Each part may be nil.
type Files struct {
	Identity    *Identity
	Authorities *Authorities
}

// New reads the files. The certificate and its key are optional, and so is the file with authorities.
func New(certFile, keyFile, authoritiesFile string) (*Files, error) {
	f := &Files{}
	var err error
	if certFile != "" || keyFile != "" {
		if f.Identity, err = NewIdentity(certFile, keyFile); err != nil {
			return nil, err
		}
	}
	if authoritiesFile != "" {
		if f.Authorities, err = NewAuthorities(authoritiesFile); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// Server returns the configuration of a server with an identity. With authorities, clients must present a certificate
// that one of them has signed.
func (f *Files) Server(protocols ...string) *tls.Config {
	config := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: protocols}
	config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.Identity.get() }
	return RequireClients(config, f.Authorities)
}

// RequireClients returns a configuration that also requires client certificates, unless the authorities are nil.
func RequireClients(config *tls.Config, authorities *Authorities) *tls.Config {
	if authorities == nil {
		return config
	}
	base := config.Clone()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pool, err := authorities.get()
		if err != nil {
			return nil, err
		}
		required := base.Clone()
		required.ClientAuth, required.ClientCAs = tls.RequireAndVerifyClientCert, pool
		return required, nil
	}
	return config
}

// Client returns the configuration for one connection to a server. Without authorities, those of the system apply.
func (f *Files) Client(serverName string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName, NextProtos: []string{"http/1.1"}}
	var err error
	if f.Authorities != nil {
		if config.RootCAs, err = f.Authorities.get(); err != nil {
			return nil, err
		}
	}
	if f.Identity != nil {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return f.Identity.get() }
	}
	return config, nil
}

// NotAfter returns the time at which the certificate expires; the zero time without an identity.
func (f *Files) NotAfter() time.Time {
	if f == nil || f.Identity == nil {
		return time.Time{}
	}
	certificate, err := f.Identity.get()
	if err != nil {
		return time.Time{}
	}
	return certificate.Leaf.NotAfter
}

// problem describes unreadable files and an expired certificate; nil if there is neither.
func (f *Files) problem(now time.Time) error {
	var problems []error
	if f.Identity != nil {
		certificate, err := f.Identity.get()
		switch {
		case err != nil:
		case now.After(certificate.Leaf.NotAfter):
			err = fmt.Errorf("the certificate in %s has expired at %s", f.Identity.files[0], certificate.Leaf.NotAfter.Format(time.RFC3339))
		case now.Before(certificate.Leaf.NotBefore):
			err = fmt.Errorf("the certificate in %s is not valid before %s", f.Identity.files[0], certificate.Leaf.NotBefore.Format(time.RFC3339))
		}
		problems = append(problems, err, f.Identity.lastProblem())
	}
	if f.Authorities != nil {
		_, err := f.Authorities.get()
		problems = append(problems, err, f.Authorities.lastProblem())
	}
	return errors.Join(problems...)
}

func (w *watched[T]) lastProblem() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.problem == nil {
		return nil
	}
	return fmt.Errorf("the last valid content stays in use: %w", w.problem)
}

// watchPeriod is the time between two checks for problems.
const watchPeriod = time.Minute

// Watch logs problems of the files until the context ends, each of them once. Nil files are allowed.
func (f *Files) Watch(ctx context.Context) { f.watch(ctx, watchPeriod) }

func (f *Files) watch(ctx context.Context, period time.Duration) {
	if f == nil {
		return
	}
	log, last := logr.FromContextOrDiscard(ctx), ""
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		next := ""
		if err := f.problem(time.Now()); err != nil {
			next = err.Error()
		}
		if next != "" && next != last {
			log.Info("TLS files need attention", "reason", next)
		}
		last = next
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
