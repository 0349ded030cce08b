from coral.backend import CORALDevice as CORALDevice
