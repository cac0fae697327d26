package authority

import (
	"crypto/tls"
	"errors"
	"sync"
	"time"
)

// Issuer hands out a certificate for a server's names, and makes a new one well before it expires. It is safe for concurrent use.
type Issuer struct {
	hosts []string

	mu        sync.Mutex
	authority *Authority
	current   *tls.Certificate
}

// NewIssuer returns an issuer for names and addresses; it refuses connections until it is told the authority by Use.
func NewIssuer(hosts ...string) *Issuer { return &Issuer{hosts: hosts} }

// Use changes the authority. A certificate of the one before is replaced.
func (i *Issuer) Use(a *Authority) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.authority == nil || !i.authority.certificates[0].Equal(a.certificates[0]) {
		i.authority, i.current = a, nil
	}
}

// Certificate is that for the next connection (tls.Config.GetCertificate).
func (i *Issuer) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.at(time.Now()) }

func (i *Issuer) at(now time.Time) (*tls.Certificate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.authority == nil {
		return nil, errors.New("no certificate yet: the certificate authority has not been read")
	}
	if i.current == nil || now.After(i.current.Leaf.NotAfter.Add(-CertificateLifetime/3)) {
		issued, err := i.authority.Issue(i.hosts, now)
		if err != nil {
			return nil, err
		}
		i.current = issued
	}
	return i.current, nil
}
