// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strings"
)

// The following types are the parts of SPDX 2.3 that a bill of materials contains.

type spdxDocument struct {
	Version       string             `json:"spdxVersion"`
	License       string             `json:"dataLicense"`
	ID            string             `json:"SPDXID"`
	Name          string             `json:"name"`
	Namespace     string             `json:"documentNamespace"`
	Created       spdxCreation       `json:"creationInfo"`
	Packages      []spdxPackage      `json:"packages"`
	Relationships []spdxRelationship `json:"relationships"`
}

type spdxCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID        string          `json:"SPDXID"`
	Name      string          `json:"name"`
	Version   string          `json:"versionInfo"`
	Location  string          `json:"downloadLocation"`
	Analyzed  bool            `json:"filesAnalyzed"`
	Concluded string          `json:"licenseConcluded"`
	Declared  string          `json:"licenseDeclared"`
	Copyright string          `json:"copyrightText"`
	Checksums []spdxChecksum  `json:"checksums,omitempty"`
	Refs      []spdxReference `json:"externalRefs,omitempty"`
}

type spdxChecksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type spdxReference struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type spdxRelationship struct {
	From string `json:"spdxElementId"`
	Type string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

// billOfMaterials returns the bill of materials of a Go binary in the format SPDX 2.3: the program, the Go standard
// library, and each module that the binary contains. The same binary gives the same document.
func billOfMaterials(name string, binary []byte, info *buildinfo.BuildInfo) ([]byte, error) {
	sum := sha256.Sum256(binary)
	program := spdxPackage{
		ID: "SPDXRef-Program", Name: filepath.Base(info.Path), Version: info.Main.Version, Location: "git+https://" + info.Main.Path, Declared: "Apache-2.0",
		Checksums: []spdxChecksum{{"SHA256", hex.EncodeToString(sum[:])}}, Refs: moduleRef(info.Main.Path, info.Main.Version),
	}
	document := spdxDocument{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Namespace:     "https://github.com/semmoe/operator/sbom/" + name + "/" + hex.EncodeToString(sum[:]),
		Created:       spdxCreation{Created: setting(info, "vcs.time"), Creators: []string{"Tool: semmoe-release"}},
		Packages:      []spdxPackage{program, {ID: "SPDXRef-Go", Name: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go"), Location: "https://go.dev/dl/", Declared: "BSD-3-Clause", Refs: moduleRef("stdlib", strings.TrimPrefix(info.GoVersion, "go"))}},
		Relationships: []spdxRelationship{{"SPDXRef-DOCUMENT", "DESCRIBES", program.ID}, {program.ID, "DEPENDS_ON", "SPDXRef-Go"}},
	}
	for i, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		p, err := modulePackage(fmt.Sprintf("SPDXRef-Module-%d", i), module)
		if err != nil {
			return nil, err
		}
		document.Packages = append(document.Packages, p)
		document.Relationships = append(document.Relationships, spdxRelationship{program.ID, "DEPENDS_ON", p.ID})
	}
	for i := range document.Packages {
		p := &document.Packages[i]
		p.Concluded, p.Copyright = "NOASSERTION", "NOASSERTION"
		if p.Declared == "" {
			p.Declared = "NOASSERTION"
		}
	}
	return json.MarshalIndent(document, "", "  ")
}

func modulePackage(id string, module *debug.Module) (spdxPackage, error) {
	p := spdxPackage{
		ID: id, Name: module.Path, Version: module.Version, Location: "https://proxy.golang.org/" + module.Path + "/@v/" + module.Version + ".zip",
		Refs: moduleRef(module.Path, module.Version),
	}
	// h1 is the SHA-256 of the list of the files' checksums (golang.org/x/mod/sumdb/dirhash), in base64.
	text, found := strings.CutPrefix(module.Sum, "h1:")
	if !found {
		return p, fmt.Errorf("module %s %s: checksum %q is invalid: it must begin with h1", module.Path, module.Version, module.Sum)
	}
	sum, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return p, fmt.Errorf("module %s %s: checksum %q: %w", module.Path, module.Version, module.Sum, err)
	}
	p.Checksums = []spdxChecksum{{"SHA256", hex.EncodeToString(sum)}}
	return p, nil
}

// moduleRef returns the package URL of a Go module.
func moduleRef(path, version string) []spdxReference {
	return []spdxReference{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + strings.ToLower(path) + "@" + version}}
}

func setting(info *buildinfo.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
