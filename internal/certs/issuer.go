// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"sync"
	"time"
)

// Issuer provides the certificate of a server or client, and renews the certificate when less than a third of its
// lifetime remains. It is safe for concurrent use.
type Issuer struct {
	usage x509.ExtKeyUsage
	hosts []string

	mu        sync.Mutex
	authority *Authority
	current   *tls.Certificate
}

// NewIssuer returns an issuer of server certificates for DNS names and IP addresses. Connections fail until Use sets
// the authority.
func NewIssuer(hosts ...string) *Issuer {
	return &Issuer{usage: x509.ExtKeyUsageServerAuth, hosts: hosts}
}

// NewClientIssuer returns an issuer of client certificates of an authority.
func NewClientIssuer(a *Authority) *Issuer {
	return &Issuer{usage: x509.ExtKeyUsageClientAuth, authority: a}
}

// Use sets the authority. A certificate of a different authority is replaced.
func (i *Issuer) Use(a *Authority) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.authority == nil || !i.authority.certificates[0].Equal(a.certificates[0]) {
		i.authority, i.current = a, nil
	}
}

// Certificate returns the certificate for the next connection of a server (tls.Config.GetCertificate).
func (i *Issuer) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.at(time.Now()) }

// ClientCertificate returns the certificate for the next connection of a client (tls.Config.GetClientCertificate).
func (i *Issuer) ClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return i.at(time.Now())
}

func (i *Issuer) at(now time.Time) (*tls.Certificate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.authority == nil {
		return nil, errors.New("no certificate yet: the certificate authority has not been read")
	}
	if i.current == nil || now.After(i.current.Leaf.NotAfter.Add(-certificateLifetime/3)) {
		issued, err := i.authority.issue(i.usage, i.hosts, now)
		if err != nil {
			return nil, err
		}
		i.current = issued
	}
	return i.current, nil
}
